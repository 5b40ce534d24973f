// FlashKernel's own threads are a small pool, whose workers spin briefly for the next parallel_for
// and then sleep. Calls run on it when the caller brings no pool of its own (C, C++, NumPy, the
// engine).
#pragma once

#include <cstdint>

#include "flashkernel/abi.h"

namespace fk {

int num_threads();
void set_num_threads(int threads);  // at least 1; takes effect at the next parallel_for

// Is an fk_parallel_for_fn over the process-wide pool; `pool` is ignored. A call from inside a body
// and a call while another thread holds the pool run inline on the calling thread. What a body
// throws on any thread is thrown here, once all threads have left the job. Safe after fork(): the
// child starts its own workers at its first call.
void pool_parallel_for(void* pool, int64_t count, int64_t grain, fk_range_body body, void* context);

}  // namespace fk
