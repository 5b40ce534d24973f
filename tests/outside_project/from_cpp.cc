// rms_norm of one row through the C++ API, its gradient from pinned memory, and the exceptions of a
// bad view and a bad call.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <flashkernel/flashkernel.hpp>
#include <vector>

int main() {
  std::vector<float> x = {1, 2, 3, 4}, y(4);
  const fk::View xv(x.data(), {1, 4}), yv(y.data(), {1, 4}), bad(y.data(), {1, 3});
  fk::RmsNormFwd args;
  args.x = xv;
  args.y = yv;
  fk::rms_norm_fwd(args);
  const double rms = std::sqrt((1 + 4 + 9 + 16) / 4.0 + 1e-6);
  for (int i = 0; i < 4; ++i) {
    if (std::fabs(y[i] - x[i] / rms) > 1e-5) return 1;
  }

  // Needs a workspace, which the call takes from the heap.
  std::vector<float> rstd = {static_cast<float>(1 / rms)}, weight(4, 1.0f), dweight(4);
  const DLDevice pinned{kDLCUDAHost, 0};
  const fk::View xp(x.data(), {1, 4}, pinned), rstdp(rstd.data(), {1}, pinned);
  const fk::View weightp(weight.data(), {4}, pinned), dweightp(dweight.data(), {4}, pinned);
  fk::RmsNormBwd backward;
  backward.dy = xp;
  backward.x = xp;
  backward.weight = weightp;
  backward.rstd = rstdp;
  backward.dweight = dweightp;
  fk::rms_norm_bwd(backward);
  if (std::fabs(dweight[3] - 16 / rms) > 1e-5) return 1;

  try {
    const fk::View half(y.data(), fk::DTypeOf<float>::value, {1, 4}, {4});
    return 1;
  } catch (const fk::Error& error) {
    if (std::strstr(error.what(), "strides: expected 2") == nullptr) return 1;
  }

  args.y = bad;
  try {
    fk::rms_norm_fwd(args);
    return 1;
  } catch (const fk::Error& error) {
    std::printf("%s\n%s\n", fk_version(), error.what());
  }
}
