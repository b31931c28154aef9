"""Walls around a process: Landlock, seccomp, resource limits, capabilities and namespaces, on Linux."""
