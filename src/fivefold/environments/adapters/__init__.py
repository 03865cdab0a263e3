"""Classes of environments and tools that an environment process loads, one kind a file.

These files run in the environment's process, under an interpreter that may have nothing of Fivefold. Each imports the
standard library and its own library only, and its neighbors here by relative names. A kind of environment has a function
`load(name, settings)`, which returns a function that makes an environment.
"""
