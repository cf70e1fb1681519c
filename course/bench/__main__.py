"""`make bench`: every measurement, one after the other."""

from course.bench import checks, grading, lm, serving, site

if __name__ == "__main__":
    checks.main()
    grading.main()
    lm.main()
    serving.main()
    site.main()
