"""What the machine offers: BLAS binding, threads, device and memory facts."""
