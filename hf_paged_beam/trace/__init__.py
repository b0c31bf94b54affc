"""What a beam search did, step by step: ``generate(..., return_beam_trace=True).beam_trace``, and its views.

trace         `BeamTrace`: a few numbers per candidate and step
tree          nodes and edges                                        ``trace.tree()``
slots         which slot of the pool held which token when           ``trace.slots()``
layout        where each node of the tree is drawn, and as what
labels        what is written on it
plot          the tree by matplotlib                                 ``trace.plot()``
slot_plot     the slots over the steps by matplotlib                 ``trace.slots().plot()``
page          the tree as a page with zoom and hover                 ``trace.to_html()``
"""

from .slots import Lifetime, SlotMap
from .trace import BeamTrace
from .tree import BeamTree, TreeNode

__all__ = ["BeamTrace", "BeamTree", "Lifetime", "SlotMap", "TreeNode"]
