"""What the instruments raise: a lesson for whoever wrote the kernel, not Triton's traceback."""

from course.runtime import CheckFailed


class KernelError(CheckFailed):
    """A kernel that the instruments refuse: it reads outside its tensors, races, does not compile.

    In a notebook only the message is printed.
    """
