"""What mamba-ssm has in `mamba_ssm.ops`."""
