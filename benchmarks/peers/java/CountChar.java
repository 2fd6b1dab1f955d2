import org.apache.flink.table.functions.ScalarFunction;

/** How often a letter is in a text. */
public class CountChar extends ScalarFunction {
    public long eval(String text, String letter) {
        char wanted = letter.charAt(0);
        long count = 0;
        for (int i = 0; i < text.length(); i++) {
            if (text.charAt(i) == wanted) {
                count++;
            }
        }
        return count;
    }
}
