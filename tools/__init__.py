"""Scripts for developers: demo, installation, studies; `kvasir_lab.kernels` checks and times kernels."""
