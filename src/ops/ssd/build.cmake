# What of this room is compiled together (cmake/units.cmake).
fk_unit(ssd_room FILES ssd.cc reference.cc)
