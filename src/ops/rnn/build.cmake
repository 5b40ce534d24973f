# What of this room is compiled together (cmake/units.cmake).
fk_unit(rnn_room FILES rnn.cc reference.cc)
fk_unit(rnn FILES cpu/*.cc)
