"""Confinement of a process: Landlock, seccomp, resource limits, capabilities and namespaces, on Linux."""
