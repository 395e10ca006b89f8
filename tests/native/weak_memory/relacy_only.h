// Relacy, without its names for operators and functions of the standard library, which it replaces.
// Included after all headers of that.
#pragma once

#include <relacy/relacy.hpp>

#undef new
#undef delete
#undef sched_yield
