# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_one FILES reduce.cc reference.cc)
fk_unit(short_rows FILES cpu/*.cc)
fk_unit(row_kernels NEXT FILES cuda.cu)
