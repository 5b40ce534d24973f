"""What mamba-ssm has in `mamba_ssm.ops.triton`; no Triton is needed here."""
