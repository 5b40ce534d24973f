# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_two FILES linear_cross_entropy.cc reference.cc)
fk_unit(projections FILES cpu.cc)
fk_unit(row_kernels NEXT FILES cuda.cu)
