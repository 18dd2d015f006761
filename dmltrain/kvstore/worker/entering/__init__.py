"""How a worker of an elastic job enters a view: a plan, which is pure, and what carries it out."""
