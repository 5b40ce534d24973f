# What of this folder is compiled together (cmake/units.cmake).
fk_unit(cuda_runtime HOST FILES indices_on_host.cu runtime.cu tma.cu)
fk_unit(small_kernels FILES launch.cu output_stage.cu)
fk_unit(portable_product FIRST LIKE_80 FILES gemm/portable_product.cu)
fk_unit(convolution_and_norm NEXT FILES norm/norm.cu)
