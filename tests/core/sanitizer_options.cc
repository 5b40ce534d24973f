// What AddressSanitizer, where it watches, is told when a program starts: memory that cannot be had
// is refused, as without it, and does not end the program.
#include "flashkernel/abi.h"

extern "C" {
FK_API const char* __asan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
}
