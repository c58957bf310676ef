"""`linear_scan` on Metal, and its gradient, in one launch each."""

import mlx.core as mx

from .scan_kernels import BACKWARD, FORWARD, ScanKernels

_kernels = ScanKernels(mx.fast.metal_kernel(**FORWARD), mx.fast.metal_kernel(**BACKWARD))

run, unsupported = _kernels.run, _kernels.unsupported
