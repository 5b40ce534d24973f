# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_two FILES ssd.cc reference.cc)
