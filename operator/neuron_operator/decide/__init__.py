"""The next single step of one model: `course.decide` over a World. Pure."""
