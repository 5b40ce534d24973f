#include "softgpu/runtime/settings.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace fk::softgpu {
namespace {

// Sets a variable for the length of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, had_ = true;
    setenv(name, value, 1);
  }
  ~Variable() { had_ ? setenv(name_, old_.c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

TEST(Settings, ChooseTheChip) {
  const Variable architecture("FK_SOFTGPU_ARCH", "75");
  EXPECT_EQ(settings_from_environment().chip.name, t4().name);
  const Variable multiprocessors("FK_SOFTGPU_MULTIPROCESSORS", "3");
  const Variable memory("FK_SOFTGPU_MEMORY_MB", "16");
  EXPECT_EQ(settings_from_environment().chip.multiprocessors, 3);
  EXPECT_EQ(settings_from_environment().chip.memory_bytes, size_t{16} << 20);
}

TEST(Settings, SayHowKernelsRun) {
  const Variable seed("FK_SOFTGPU_SEED", "7"), races("FK_SOFTGPU_RACES", "1");
  EXPECT_EQ(settings_from_environment().launch.seed, 7u);
  EXPECT_TRUE(settings_from_environment().launch.check_races);
  const Variable counters("FK_SOFTGPU_COUNTERS", "somewhere.json");
  EXPECT_TRUE(settings_from_environment().launch.count_memory);
}

TEST(SettingsDeathTest, AreRefusedWhereTheyMakeNoSense) {
  const auto with = [](const char* name, const char* value) {
    const Variable variable(name, value);
    settings_from_environment();
    std::exit(0);
  };
  const auto refused = testing::ExitedWithCode(2);
  EXPECT_EXIT(with("FK_SOFTGPU_ARCH", "86"), refused, "FK_SOFTGPU_ARCH: expected 75, 80 or 90");
  EXPECT_EXIT(with("FK_SOFTGPU_MULTIPROCESSORS", "0"), refused, "expected a number from 1 on");
  EXPECT_EXIT(with("FK_SOFTGPU_SEED", "-1"), refused, "FK_SOFTGPU_SEED");
  EXPECT_EXIT(with("FK_SOFTGPU_SEED", "often"), refused, "got 'often'");
}

}  // namespace
}  // namespace fk::softgpu
