"""`linear_scan` on an NVIDIA GPU, and its gradient, in one launch each.

The kernels are those for Metal in CUDA's words. Each is compared with the definition at its first use on
a device, and does not run where it differs.
"""

from ..backend.cuda_kernel import CudaKernel
from .scan_kernels import BACKWARD, FORWARD, ScanKernels

_kernels = ScanKernels(CudaKernel.of_metal(**FORWARD), CudaKernel.of_metal(**BACKWARD))

run, unsupported = _kernels.run, _kernels.unsupported
