"""How good a policy is: estimates over named sets of problems, with intervals."""
