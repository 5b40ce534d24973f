# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_two FILES causal_conv1d.cc reference.cc)
fk_unit(causal_conv1d FILES cpu/*.cc)
fk_unit(convolution_and_norm NEXT FILES cuda/*.cu)
