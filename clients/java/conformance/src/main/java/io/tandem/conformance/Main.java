package io.tandem.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/** Plays a caller of the Java client: carries out the commands on its standard input. */
public final class Main {
  private static final Gson GSON =
      new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);

  private Main() { }

  /**
   * Reads commands until the input ends.
   *
   * @param args none
   * @throws IOException the input cannot be read
   */
  public static void main(String[] args) throws IOException {
    Caller caller = new Caller(Main::say);
    var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      caller.begin(JsonParser.parseString(line).getAsJsonObject());
    }
    caller.close();
    System.exit(0);
  }

  private static synchronized void say(JsonObject line) {
    OUT.println(GSON.toJson(line));
    OUT.flush();
  }
}
