# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_two FILES linear.cc packed_linear.cc reference.cc)
fk_unit(projections FILES cpu/*.cc)
fk_unit(linear_sm90 FIRST FILES sm90/*.cu)
