"""Scripts for developers: demo, installation, studies; `tools.kernels` checks and times kernels."""
