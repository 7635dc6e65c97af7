"""DeepEP's name for `tokenyard.deep_ep`, which `import deep_ep` gets from here on, with all of its submodules."""

from tokenyard.deep_ep import _names

_names.take(__name__)
