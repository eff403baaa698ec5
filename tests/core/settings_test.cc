#include "core/base/settings.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "environment.h"

namespace dscomm {
namespace {

using test::Environment;
using test::Variable;

// The error that these variables cause; empty if none.
std::string error_of(std::initializer_list<Variable> variables) {
  Environment environment(variables);
  Result<Settings> settings = Settings::from_environment();
  if (settings.ok()) return "";
  EXPECT_EQ(settings.status().code(), Code::kInvalidArgument);
  return settings.status().message();
}

TEST(Settings, EnvironmentWithoutSettingsGivesDefaults) {
  Result<Settings> settings = Settings::from_environment();
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings.value().yield_us, 200);
  EXPECT_EQ(settings.value().hierarchy, "auto");
  EXPECT_EQ(settings.value().topology, "");
}

TEST(Settings, EverySettingIsKnownAndSuggestedIfMisspelt) {
  for (const SettingRow& row : setting_rows()) {
    // An empty value means the default.
    EXPECT_EQ(error_of({{row.name.c_str(), ""}}), "");
    EXPECT_EQ(error_of({{row.name.c_str(), row.default_value.c_str()}}), "");
    const std::string misspelt = row.name + "X";
    EXPECT_EQ(error_of({{misspelt.c_str(), row.default_value.c_str()}}),
              misspelt + " is not a setting of dscomm; did you mean " + row.name + "?");
  }
}

TEST(Settings, UnknownSettingIsAnErrorForAnyValue) {
  EXPECT_EQ(error_of({{"DSCOMM_SPIN_PAUSE", "5"}}),
            "DSCOMM_SPIN_PAUSE is not a setting of dscomm; did you mean DSCOMM_SPIN_PAUSES?");
  EXPECT_EQ(error_of({{"DSCOMM_YELD_US", ""}}),
            "DSCOMM_YELD_US is not a setting of dscomm; did you mean DSCOMM_YIELD_US?");
  EXPECT_EQ(error_of({{"DSCOMM_TIMEOUT", "3"}}).rfind("DSCOMM_TIMEOUT is not a setting", 0), 0u);
  EXPECT_EQ(error_of({{"DSCOMM_", "3"}}).rfind("DSCOMM_ is not a setting", 0), 0u);
  EXPECT_EQ(error_of({{"DSCOMM_yield_us", "3"}}).rfind("DSCOMM_yield_us is not", 0), 0u);
}

TEST(Settings, PortsMustBeAValidRange) {
  for (const char* good : {"20000-20999", "1024-65535", "7000-7000"})
    EXPECT_EQ(error_of({{"DSCOMM_PORTS", good}}), "") << good;
  for (const char* bad : {"20000", "20000-", "-20000", "1023-2000", "2000-1999", "2000-65536",
                          "2000-3000-4000", "a-b"})
    EXPECT_EQ(error_of({{"DSCOMM_PORTS", bad}}),
              std::string("DSCOMM_PORTS=") + bad +
                  ": expected two ports from 1024 to 65535, lower first, as in 20000-20999");
  const PortRange range = parse_ports("20000-20999").value_or(PortRange{});
  EXPECT_EQ(range.first, 20000);
  EXPECT_EQ(range.last, 20999);
}

TEST(Settings, PortsOfRanksOfOneHostDoNotOverlap) {
  const PortRange all{20000, 20009};
  const PortRange first = ports_of_rank(all, 0, 2), second = ports_of_rank(all, 1, 2);
  EXPECT_EQ(first.first, 20000);
  EXPECT_EQ(first.last, 20004);
  EXPECT_EQ(second.first, 20005);
  EXPECT_EQ(second.last, 20009);
}

TEST(Settings, PortRangeTooShortToDivideIsGivenToEveryRank) {
  const PortRange all{20000, 20006};
  EXPECT_EQ(ports_of_rank(all, 1, 2).first, 20000);
  EXPECT_EQ(ports_of_rank(all, 1, 2).last, 20006);
  EXPECT_TRUE(ports_of_rank(PortRange{}, 1, 2).is_any());
}

TEST(Settings, VariablesOfOtherProgramsAreIgnored) {
  EXPECT_EQ(error_of({{"DSCOMMON", "1"}, {"MY_DSCOMM_YIELD", "1"}, {"dscomm_debug", "x"}}), "");
}

TEST(Settings, InvalidValuesAreRefused) {
  EXPECT_EQ(error_of({{"DSCOMM_YIELD_US", "soon"}}),
            "DSCOMM_YIELD_US=soon: expected a whole number from 0 to 1000000");
  for (const char* value : {"-1", "1000001", "5 ", "0x5", "99999999999999999999"})
    EXPECT_EQ(error_of({{"DSCOMM_YIELD_US", value}}).rfind("DSCOMM_YIELD_US=", 0), 0u) << value;
  EXPECT_EQ(error_of({{"DSCOMM_DEBUG", "loud"}}),
            "DSCOMM_DEBUG=loud: expected one of error|warn|info|debug");
  EXPECT_EQ(error_of({{"DSCOMM_DEBUG", "warn|info"}}).rfind("DSCOMM_DEBUG=warn|info", 0), 0u);
  Environment environment({{"DSCOMM_YIELD_US", "7"}, {"DSCOMM_DEBUG", "info"}});
  Result<Settings> settings = Settings::from_environment();
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings.value().yield_us, 7);
  EXPECT_EQ(settings.value().debug, "info");
}

}  // namespace
}  // namespace dscomm
