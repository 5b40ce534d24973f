"""`fk bench --device softgpu`: what the kernels do on the GPU in software (docs/softgpu.md),
counted in place of timed, so that it is the same on every run; and estimates of the time that are
made from the counters."""
