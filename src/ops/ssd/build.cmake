# What of this room is compiled together (cmake/units.cmake).
fk_unit(ssd FILES ssd.cc reference.cc cpu/*.cc)
fk_unit(ssd_backward LIKE_80 FILES cuda/backward.cu)
fk_unit(ssd_forward LIKE_80 FILES cuda/forward.cu)
