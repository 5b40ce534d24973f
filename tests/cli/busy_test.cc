#include "cli/busy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace fk::cli {
namespace {

// The counters of a machine of two CPUs, in hundredths of a second as a rule.
class BusyTest : public testing::Test {
 protected:
  void SetUp() override { write(0, 0, 0); }
  void TearDown() override { std::remove(path_.c_str()); }

  void write(int64_t user, int64_t idle, int64_t steal) const {
    std::ofstream file(path_);
    file << "cpu  " << user << " 0 0 " << idle << " 0 0 0 " << steal << " 0 0\n"
         << "cpu0 1 0 0 1 0 0 0 0 0 0\ncpu1 1 0 0 1 0 0 0 0 0 0\nprocs_running 3\n";
  }

  const std::string path_ = testing::TempDir() + "fk_stat_" + std::to_string(getpid());
};

TEST_F(BusyTest, QuietMachine) {
  const BusyWatch watch(2, path_);
  write(0, 1000, 0);
  const BusyWatch::Seen seen = watch.seen();
  EXPECT_EQ(seen.cpus, 2);
  EXPECT_EQ(seen.others_cpus, 0);
  EXPECT_FALSE(seen.disturbed);
  EXPECT_EQ(describe(seen), "");
  nlohmann::json row;
  add_to(seen, &row);
  EXPECT_EQ(row["disturbed"].size(), 0u);
  EXPECT_EQ(row["busy"]["steal"], 0);
}

TEST_F(BusyTest, OtherPrograms) {
  const BusyWatch watch(2, path_);
  write(100000, 0, 0);  // far more than we have used
  const BusyWatch::Seen seen = watch.seen();
  EXPECT_GT(seen.others_cpus, 1);
  EXPECT_TRUE(seen.disturbed);
  EXPECT_NE(describe(seen).find("This machine was busy"), std::string::npos);
  nlohmann::json row;
  add_to(seen, &row);
  EXPECT_EQ(row["disturbed"].size(), 1u);
}

TEST_F(BusyTest, StolenTime) {
  const BusyWatch watch(2, path_);
  write(0, 900, 100);
  EXPECT_NEAR(watch.seen().steal, 0.1, 1e-9);
  EXPECT_TRUE(watch.seen().disturbed);
}

TEST_F(BusyTest, NoCounters) {
  const BusyWatch watch(2, path_ + "_none");
  EXPECT_EQ(watch.seen().cpus, 0);
  EXPECT_FALSE(watch.seen().disturbed);
  nlohmann::json row;
  add_to(watch.seen(), &row);
  EXPECT_FALSE(row.contains("busy"));
}

}  // namespace
}  // namespace fk::cli
