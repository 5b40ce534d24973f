# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_one FILES cross_entropy.cc reference.cc)
fk_unit(short_rows FILES cpu.cc)
fk_unit(row_kernels NEXT FILES cuda.cu)
