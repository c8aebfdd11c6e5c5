"""Choose the type of every tensor so that the file fits the memory and the predicted KL divergence is lowest.

    problem    groups of tensors, the options of each (type, device, cost, bytes), limits: plain data
    solver     the optimum of a problem and a proof of how far from it the result can be (scipy's HiGHS)
    costs      the costs file that `quantkit sensitivity` writes
    groups     tensors, costs and the user's constraints to groups with options
    pools      which devices may hold a tensor, and what they hold besides
    recipe     the result as rules by classes and ranges of layers

Takes names, shapes, types and measured costs; gives types and devices. Loads no weights. scipy is imported when a
problem is solved.
"""
