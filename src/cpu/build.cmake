# The matrix products, which are compiled together (cmake/units.cmake).
fk_unit(gemm VECTOR FILES gemm/multiply.cc gemm/multiply_blocks.cc)
# The norms by rows, with the ops that are nothing else.
fk_unit(norm VECTOR FILES norm/*.cc)
