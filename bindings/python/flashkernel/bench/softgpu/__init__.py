"""`fk bench --device softgpu`: what the kernels do on the GPU in software (docs/softgpu.md), counted
and the same on every run, in place of times; and an estimate of the time made from the counters."""
