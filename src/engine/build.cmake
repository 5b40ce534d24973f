# Vector code of the engine, which is compiled together (cmake/units.cmake).
fk_unit(engine VECTOR FILES attention.cc probes.cc rows.cc)
