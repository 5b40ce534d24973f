# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_one FILES norm.cc reference.cc)
fk_unit(norm FILES cpu/*.cc)
fk_unit(convolution_and_norm NEXT FILES cuda/*.cu)
