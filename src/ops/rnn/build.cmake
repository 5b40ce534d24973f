# What of this room is compiled together (cmake/units.cmake).
fk_unit(rnn_room FILES rnn.cc reference.cc)
fk_unit(rnn FILES cpu/*.cc)
fk_unit(rnn_steps FILES cuda/prepare.cu cuda/kept.cu cuda/kept_plan.cu cuda/steps_forward.cu)
fk_unit(rnn_steps_backward FILES cuda/steps_backward.cu)
fk_unit(rnn_kept_global LIKE_80 FILES cuda/kept_global.cu)
fk_unit(rnn_kept_shared NEXT FILES cuda/kept_shared.cu)
