# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_two FILES softmax.cc reference.cc)
fk_unit(softmax FILES cpu/*.cc)
fk_unit(row_kernels NEXT FILES cuda.cu)
