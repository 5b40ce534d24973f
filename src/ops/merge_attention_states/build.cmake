# What of this room is compiled together (cmake/units.cmake).
fk_unit(rooms_one FILES merge_attention_states.cc reference.cc)
fk_unit(small_ops FILES cpu.cc)
fk_unit(small_kernels FILES cuda.cu)
