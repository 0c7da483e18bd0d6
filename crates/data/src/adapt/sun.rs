//! Position of the sun: the Fourier series of Spencer, "Fourier series representation of the position of the sun",
//! Search 2(5), 1971, p. 172 (also Iqbal, An Introduction to Solar Radiation, 1983, eqs. 1.2.1, 1.3.1 and 1.4.1).

use std::f64::consts::{PI, TAU};

use crate::calendar::Date;

/// The sun at an instant, as seen from the earth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sun {
    /// Declination in radians.
    pub(super) declination: f64,
    /// Square of the mean distance divided by the distance.
    pub(super) eccentricity: f64,
    /// Hour angle at longitude 0, in radians.
    pub(super) hour_angle: f64,
}

impl Sun {
    /// At a date whose time is UTC. The series run over a year of any length, so that calendars without leap years keep
    /// their seasons.
    pub(super) fn at(date: &Date) -> Self {
        let angle = TAU * date.day_of_year / date.year_days;
        let (sin, cos) = angle.sin_cos();
        let (sin2, cos2) = (2.0 * angle).sin_cos();
        let (sin3, cos3) = (3.0 * angle).sin_cos();
        let declination = 0.006_918 - 0.399_912 * cos + 0.070_257 * sin - 0.006_758 * cos2 + 0.000_907 * sin2
            - 0.002_697 * cos3
            + 0.001_48 * sin3;
        let eccentricity = 1.000_11 + 0.034_221 * cos + 0.001_28 * sin + 0.000_719 * cos2 + 0.000_077 * sin2;
        let equation_of_time =
            0.000_075 + 0.001_868 * cos - 0.032_077 * sin - 0.014_615 * cos2 - 0.040_849 * sin2;
        Self { declination, eccentricity, hour_angle: TAU * date.fraction - PI + equation_of_time }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TimeAxis, TimeUnit};

    fn sun(time: f64) -> Sun {
        let unit = TimeUnit { unit: "hours since 2023-01-01".to_owned(), calendar: None };
        Sun::at(&TimeAxis::new(&unit).unwrap().date(time))
    }

    /// Against the almanac of 2023: declinations within the 0.0006 rad of the series, the equation of time within half a minute,
    /// the radiation within 0.1 %.
    #[test]
    fn the_sun_is_where_the_almanac_says() {
        let day = |number: f64| sun((number - 1.0) * 24.0 + 12.0);
        let minutes = |sun: &Sun| sun.hour_angle / TAU * 24.0 * 60.0;
        // 21 June, solstice: 23.44 degrees, -1.9 minutes.
        let june = day(172.0);
        assert!((june.declination.to_degrees() - 23.44).abs() < 0.035, "{june:?}");
        assert!((minutes(&june) + 1.9).abs() < 0.5, "{}", minutes(&june));
        // 22 December, solstice.
        assert!((day(356.0).declination.to_degrees() + 23.44).abs() < 0.035);
        // 20 March 21:24 UTC, equinox.
        assert!(sun(78.0 * 24.0 + 21.4).declination.to_degrees().abs() < 0.2);
        // 3 November: the largest equation of time, 16.4 minutes; 11 February: the smallest, -14.2.
        assert!((minutes(&day(307.0)) - 16.4).abs() < 0.5);
        assert!((minutes(&day(42.0)) + 14.2).abs() < 0.5);
        // 4 January, perihelion at 0.98330 au; 6 July, aphelion at 1.01668 au.
        assert!((day(4.0).eccentricity - 0.98330_f64.powi(-2)).abs() < 1e-3);
        assert!((day(187.0).eccentricity - 1.01668_f64.powi(-2)).abs() < 1e-3);
    }

    /// By hand: on 1 January at 0 h, all cosines are 1 and all sines 0.
    #[test]
    fn the_series_at_the_start_of_a_year() {
        let sun = sun(0.0);
        assert!((sun.declination - (0.006_918 - 0.399_912 - 0.006_758 - 0.002_697)).abs() < 1e-15);
        assert!((sun.eccentricity - 1.035_05).abs() < 1e-15);
        assert!((sun.hour_angle + PI - (0.000_075 + 0.001_868 - 0.014_615)).abs() < 1e-15);
    }
}
