# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_one FILES attention.cc reference.cc)
fk_unit(attention FILES cpu/*.cc)
fk_unit(attention_forward LIKE_80 FILES cuda/forward_launch.cu)
fk_unit(attention_backward FIRST FILES cuda/backward_launch.cu)
fk_unit(attention_sm90 FIRST FILES sm90/*.cu sm90/backward/*.cu)
fk_unit(small_kernels FILES cuda/forward.cu cuda/backward.cu cuda/prepare.cu cuda/finish.cu)
