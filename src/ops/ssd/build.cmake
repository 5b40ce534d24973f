# What of this room is compiled together (cmake/units.cmake).
fk_unit(ssd FILES ssd.cc reference.cc cpu/*.cc)
