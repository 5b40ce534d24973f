# What of this folder is compiled together (cmake/units.cmake).
fk_unit(cuda_runtime HOST FILES indices_on_host.cu runtime.cu tma.cu)
fk_unit(small_kernels FILES launch.cu)
fk_unit(portable_product FIRST LIKE_80 FILES gemm/portable_product.cu)
