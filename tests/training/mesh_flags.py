"""What a program that simulates devices needs in its environment, before JAX starts."""

from importlib.metadata import version

# As in conftest.py.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"


def environment(devices: int) -> dict[str, str]:
    """Variables for `devices` simulated CPU devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_FLAGS}",
        # A collective waits in a thread of XLA's pool: each device needs several.
        "PJRT_NPROC": "64",
    }
