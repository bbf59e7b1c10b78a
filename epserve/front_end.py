"""`python -m epserve.front_end`: a front end in a process of its own (`epserve.service.front_end`)."""

import os
import sys

if __name__ == "__main__":
    from epserve.process import working_folder

    working_folder.leave_out()
    from epserve.service.front_end import main

    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    sys.exit(main())
