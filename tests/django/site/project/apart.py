"""Tasks whose library only the machines of the workers have."""

raise ImportError("no such library")
