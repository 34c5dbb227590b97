"""The causal convolution of a few taps with SiLU and unit-length heads, forward and backward."""

from pallas_kernels.short_convolution.api import short_convolution as short_convolution
from pallas_kernels.short_convolution.arguments import Part as Part
from pallas_kernels.short_convolution.arguments import joined_inputs as joined_inputs
