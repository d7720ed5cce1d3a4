"""SGLang's GPU kernels have no build for our CPU: every name can be imported, none can be called."""

__version__ = "0.4.10"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not on a CPU")

    return kernel
