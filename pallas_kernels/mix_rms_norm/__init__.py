"""The RMS norm of a gated mix in one pass, forward and backward."""

from pallas_kernels.mix_rms_norm.api import mix_rms_norm as mix_rms_norm
