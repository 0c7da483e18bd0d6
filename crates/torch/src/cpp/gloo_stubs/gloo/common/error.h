// Stand-in for a gloo header that libtorch's package leaves out; ProcessGroupGloo.hpp includes it and needs nothing of it.
#pragma once
