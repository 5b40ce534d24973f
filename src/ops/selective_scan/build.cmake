# What of this room is compiled together (cmake/units.cmake).
fk_unit(selective_scan FILES selective_scan.cc reference.cc cpu/*.cc)
fk_unit(scan_forward FIRST FILES cuda/forward_launch.cu)
fk_unit(scan_backward FIRST FILES cuda/forward.cu cuda/named.cu cuda/backward.cu cuda/backward_launch.cu)
